// Submits a chat over NATS, streams its answer, and reads on where messages were lost.
//
//	go run client.go "What is 347 + 586?"
package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
)

const silence = 10 * time.Second

func main() {
	question, id := "What is 347 + 586?", nuid.Next() // save id with the next number, and go on after a restart
	if len(os.Args) > 1 {
		question = os.Args[1]
	}
	nc, err := nats.Connect(login())
	if err != nil {
		log.Fatal(err)
	}
	defer nc.Close()
	body := map[string]any{
		"model": "demo", "max_tokens": 200, "stream": true, "messages": []map[string]string{{"role": "user", "content": question}},
	}
	if err := answer(nc, id, body, write); err != nil {
		log.Fatal(err)
	}
	fmt.Println()
}

func login() (string, nats.Option, nats.Option) {
	path := os.Getenv("STATE")
	if path == "" {
		path = ".penstock/state.json"
	}
	data, err := os.ReadFile(path)
	if err != nil {
		log.Fatal(err)
	}
	var state struct {
		ClientNats struct{ Server, User, Password string } `json:"client_nats"`
	}
	if err := json.Unmarshal(data, &state); err != nil {
		log.Fatal(err)
	}
	return state.ClientNats.Server, nats.UserInfo(state.ClientNats.User, state.ClientNats.Password), nats.MaxReconnects(-1)
}

func write(body []byte) {
	var chunk struct {
		Choices []struct{ Delta struct{ Content string } }
	}
	if json.Unmarshal(body, &chunk) == nil && len(chunk.Choices) > 0 {
		fmt.Print(chunk.Choices[0].Delta.Content)
	}
}

// answer passes every message of an answer once, in order. Submitting again with the same id runs nothing twice.
func answer(nc *nats.Conn, id string, body any, onMessage func([]byte)) error {
	digest := sha256.Sum256([]byte(id))
	messages := make(chan *nats.Msg, 8192)
	live, err := nc.ChanSubscribe("ps.answer."+hex.EncodeToString(digest[:16]), messages)
	if err != nil {
		return err
	}
	defer live.Unsubscribe()
	reconnected := make(chan bool, 1)
	nc.SetReconnectHandler(func(*nats.Conn) {
		select {
		case reconnected <- true:
		default:
		}
	})
	js, err := nc.JetStream()
	if err != nil {
		return err
	}
	data, _ := json.Marshal(body)
	submission := &nats.Msg{Subject: "ps.submit.demo", Data: data, Header: nats.Header{"Nats-Msg-Id": {id}}}
	if _, err := js.PublishMsg(submission); err != nil {
		return err
	}

	reader, next, wait, due := nuid.Next(), 0, time.Second, silence
	waiting := map[int]*nats.Msg{}
	var again *nats.Subscription
	for {
		select {
		case message := <-messages:
			number, err := strconv.Atoi(message.Header.Get("Penstock-Seq"))
			if err != nil { // of this read, not of the answer
				switch code := message.Header.Get("Penstock-Error"); code {
				case "request_erased", "answer_ended", "invalid_request":
					return fmt.Errorf("%s: %s", code, message.Data)
				}
				due = wait
				continue
			}
			had := next
			waiting[number] = message
			for ready := waiting[next]; ready != nil; ready = waiting[next] {
				delete(waiting, next)
				next++
				if code := ready.Header.Get("Penstock-Error"); code != "" {
					return fmt.Errorf("%s: %s", code, ready.Data)
				}
				onMessage(ready.Data)
				if ready.Header.Get("Penstock-Final") != "" {
					return nil
				}
			}
			if next > had {
				wait = time.Second
			}
			if due = silence; len(waiting) > 0 {
				due = wait
			}
			continue
		case <-reconnected:
		case <-time.After(due):
		}
		if again != nil { // one read at a time
			again.Unsubscribe()
		}
		inbox := nats.NewInbox()
		if again, err = nc.ChanSubscribe(inbox, messages); err != nil {
			return err
		}
		query, _ := json.Marshal(map[string]any{"key": id, "from": next, "reader": reader})
		if err := nc.PublishRequest("ps.read", inbox, query); err != nil {
			return err
		}
		if wait *= 2; wait > 8*time.Second {
			wait = 8 * time.Second
		}
		due = wait
	}
}
